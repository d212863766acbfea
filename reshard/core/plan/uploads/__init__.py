"""Plans of targets at URLs: memory of uploads, and bytes that the store copies itself."""
