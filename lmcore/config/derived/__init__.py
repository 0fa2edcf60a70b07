"""Values derived from the sections: parallel layout, batch sizes, counts of a model, sources."""
