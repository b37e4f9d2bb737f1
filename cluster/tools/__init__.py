"""Commands that measure and plan. Nothing that serves imports them."""
