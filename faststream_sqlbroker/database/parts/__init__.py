"""What several subjects do on a connection; none of it begins or commits."""
