SELECT queue FROM message FORCE INDEX (message_leased) WHERE queue > :after ORDER BY queue LIMIT 1
