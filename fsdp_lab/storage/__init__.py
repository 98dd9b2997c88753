"""Files that are whole or absent, locks between processes, and objects in object storage. Imports `config`.

Start with `files.py`.
"""
