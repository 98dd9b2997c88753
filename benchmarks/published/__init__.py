"""Forecasts against steps that others have published: `make published`.

Start with `__main__.py`. `rows.py` reads the published rows, `decoders.py` has their models, `steps.py` traces them,
`fit.py` fits efficiencies to the rows of MPT, and `summary.py` judges the errors.
"""
