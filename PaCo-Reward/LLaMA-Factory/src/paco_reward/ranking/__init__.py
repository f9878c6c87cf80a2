"""`paco-reward rank`: people rank sets of pictures, and label pairs and edits, on a page."""
