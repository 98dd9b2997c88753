"""Models that read one text and write another: data sets of pairs."""
