-- Reads the number of the transaction (NULL: it has none), to prove that it is still the one that
-- has locked a handler's rows. It is sent where no other statement compares the numbers.
SELECT pg_current_xact_id_if_assigned()::text
