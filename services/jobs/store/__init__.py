"""Everything the jobs service says to its database: one file of statements per table, one transaction type.

The same SQLAlchemy Core statements run on MySQL/MariaDB and SQLite; where the two differ, `time.py` and `database.py`
hide it.
"""
