-- Sets the idle limit of a handler's transaction anew, when the handler is given more time.
-- @sqlbroker_idle is the application's own limit (`begin_limited_mariadb`), 0 if there is none.
-- The shorter one counts.
SET @@SESSION.idle_transaction_timeout = \
  CASE @sqlbroker_idle WHEN 0 THEN :limit ELSE LEAST(@sqlbroker_idle, :limit) END
