DO $$ BEGIN
  IF pg_is_in_recovery() THEN
    RAISE read_only_sql_transaction USING MESSAGE = 'the server is a read-only standby';
  ELSIF current_setting('transaction_read_only') = 'on' THEN
    RAISE read_only_sql_transaction USING MESSAGE =
      'transactions are read-only: see default_transaction_read_only';
  END IF;
  PERFORM pg_logical_emit_message(true, 'sqlbroker', '');
END $$
