-- Begins a transaction on a driver in autocommit mode.
-- SQLAlchemy does not know of that mode. Without this, the driver would commit each statement.
START TRANSACTION
