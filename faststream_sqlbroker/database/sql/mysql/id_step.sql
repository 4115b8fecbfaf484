SELECT @@auto_increment_increment
