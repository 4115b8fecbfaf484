UPDATE {message} SET payload = :payload WHERE id = :id
