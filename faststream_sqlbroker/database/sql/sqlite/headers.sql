-- Writes the new headers of messages that stay, as JSON text. It is sent after `update`, for the
-- few messages whose headers change.
UPDATE {message} SET headers = u.headers
FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS headers
  FROM json_each(:rows)) u
WHERE {message}.id = u.id
