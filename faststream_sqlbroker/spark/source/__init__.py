"""The format "sqlbroker": the tables through Python's database drivers, in batches and as a stream.

Spark finds it through the module `pyspark_sqlbroker`; nothing here is imported by hand.
"""
