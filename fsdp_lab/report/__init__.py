"""The report of a sweep: tables, plots and the recommended setting. Imports `record`; never trains.

Start with `recommend.py`, which chooses from settings by rules and returns codes with values. `speed.py` computes
intervals, `answer.py` and `templates/` write the sentences, `page.py` the files.
"""
