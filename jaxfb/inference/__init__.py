"""Uses of trained parameters: continuations, chat, and scores of texts and of tasks."""
