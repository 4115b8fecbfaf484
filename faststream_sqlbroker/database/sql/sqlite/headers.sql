UPDATE {message} SET headers = u.headers
FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS headers
  FROM json_each(:rows)) u
WHERE {message}.id = u.id
