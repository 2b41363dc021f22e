"""A cluster's own memory: pools, what lies in them, the words that say what is valid, and copying."""
