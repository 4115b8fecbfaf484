SELECT m.queue, m.`key` FROM message m WHERE m.id = :id
