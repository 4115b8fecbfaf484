-- Sets the level of the transaction that begins, and of this one only, where no idle limit is set.
-- SQLAlchemy's `isolation_level` sets the session's level at every checkout and back at every
-- return, each with a COMMIT: five round trips where this is one.
SET TRANSACTION ISOLATION LEVEL READ COMMITTED
