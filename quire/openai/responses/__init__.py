"""OpenAI's Responses: bodies to chats, and outputs to items, events and resources."""
