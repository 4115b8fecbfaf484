-- Sets the idle limit of a handler's transaction anew, when the handler is given more time.
-- MySQL has no limit for idle transactions, only one for all idling; `restore` changes it back.
-- @sqlbroker_idle is the application's own limit (`begin_limited`). The shorter one counts.
SET @@SESSION.wait_timeout = CAST(LEAST(@sqlbroker_idle, :limit) AS UNSIGNED)
