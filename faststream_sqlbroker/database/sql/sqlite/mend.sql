UPDATE {message} SET next_attempt_at = {now} WHERE id = :id
