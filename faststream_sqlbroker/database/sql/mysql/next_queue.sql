SELECT queue FROM {message} FORCE INDEX ({leased_index}) WHERE queue > :after \
  ORDER BY queue LIMIT 1
