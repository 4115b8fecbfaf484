-- Tells how many bytes are free where the server keeps its tables. It needs the plugin DISKS, and
-- the right FILE.
SELECT available * 1024 FROM information_schema.disks
WHERE left(@@datadir, length(path)) = path
ORDER BY length(path) DESC LIMIT 1
