"""What runs beside and inside the engines: router, agent, KV connector, and the contract that the operator shares.

Only ``engine`` imports vLLM and torch. Everything else runs on the light base install.
"""

__version__ = "0.1.0"
