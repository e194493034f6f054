"""What is known of requests that are over, and who is told: metrics, history, spans, the access log.

Belongs here: records, the field's measures of them, counting. Does not belong here: what a request does (``request``),
pages that show it (``endpoints``).
"""
