"""The HTTP side of an ingress: the OpenAI API on FastAPI. Knows nothing of Ray.

A completion goes through `app`, `completions`, `bodies`, `openai` (checks), `prompts`, `text`
(tokens), `generation` (engines), `choices` (text again) and `responses`.
"""
