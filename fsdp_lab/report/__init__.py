"""The report of a sweep: tables, plots and the recommended setting. Never trains.

Start with `data.py`, the sweep as plain values, and `choice.py`, the rules of the recommendation. `speed.py` computes
intervals, `answer.py` writes the sentences, `write.py` the three files.
"""
