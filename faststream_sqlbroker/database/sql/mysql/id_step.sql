-- Reads the step between the ids of one INSERT, of which MySQL tells the first id only.
-- It is read each time: a cluster changes the step when a node joins.
-- Source: MySQL manual, "AUTO_INCREMENT Handling in InnoDB": a simple insert gets its ids at once.
SELECT @@auto_increment_increment
