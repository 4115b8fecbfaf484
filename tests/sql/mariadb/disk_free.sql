SELECT available * 1024 FROM information_schema.disks
WHERE left(@@datadir, length(path)) = path
ORDER BY length(path) DESC LIMIT 1
