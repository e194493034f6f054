"""What the API server is asked and what it tells: requests, logins, watches, and the cache that both feed.

Belongs here: what would serve another operator as well. Does not belong here: what a service is made of (``objects``).
"""
