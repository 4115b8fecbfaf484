"""Why a message does not run."""
