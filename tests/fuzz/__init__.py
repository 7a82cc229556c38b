"""Bad input of every kind: messages, files, requests."""
