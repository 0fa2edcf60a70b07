"""The machinery of the test suite: which tests run, how long they may take, what is reported."""
