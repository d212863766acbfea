"""How requests to URLs are made: when they have failed, how often they are made again, and what S3 needs of its own."""
