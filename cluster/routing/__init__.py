"""Routing: which gang serves a request. Knows neither HTTP nor Ray.

Words: a *gang* is one engine, on one GPU worker or on several that shard long sequences. An
*ingress* is one HTTP process, with a router of its own. The *index* says which gang holds which KV
blocks: workers report to one *hub*, and every ingress keeps a *mirror* of it.
"""
