"""Parts of a checkpoint of any format that a run loads: weights, tokenizer, model shape."""
