"""S3: settings and signatures, the client, and files that are sent in parts."""
