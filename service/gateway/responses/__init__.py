"""`/v1/responses`: OpenAI's Responses, kept in the records of requests and read from their logs."""
