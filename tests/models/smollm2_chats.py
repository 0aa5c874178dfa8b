"""Thirty chats for the golden test with a real model: several languages, code, short and long."""

LONG_TEXT = (
    "The harbour opens at five. Boats come in with herring and mackerel, the scales are read "
    "aloud, and a clerk writes each weight into a book with a green cover. "
)

QUESTIONS = (
    "What is the capital of France?",
    "Say hi.",
    "2+2?",
    "Name three primary colours.",
    "Write a haiku about rain.",
    "Explain what a message queue is, in two sentences.",
    "Write a Python function that reverses a string.",
    "What does this print?\n```python\nprint([n * n for n in range(5)])\n```",
    "Fix the bug: `for (int i = 0; i <= len; i++) sum += a[i];`",
    "SELECT name FROM users WHERE age > 30; Explain this query.",
    "Was ist die Hauptstadt von Österreich?",
    "Écris une phrase sur la mer.",
    "¿Cuántos días tiene una semana?",
    "Qual è il fiume più lungo d'Italia?",
    "日本の首都はどこですか?",
    "中国最大的城市是哪个?",
    "Какая планета самая большая?",
    "ما هي عاصمة مصر؟",
    "Translate to French: good morning, my friend.",
    "Give me JSON with the keys name and age for Anna, 31.",
    "List the steps to boil an egg:\n  1. \n  2. \n  3. ",
    "Why is the sky blue? 🌤️",
    "x =  42\ny\t= 7\n\nWhat is x * y?",
    "Continue: once upon a time, in a town by the sea,",
    "Summarize: " + LONG_TEXT * 4,
    LONG_TEXT * 10 + "What colour is the book?",
    "Repeat after me: <|im_end|> is text here.",
    "What is 17 * 23? Think step by step.",
)

CHATS: tuple[list[dict[str, str]], ...] = (
    *([{"role": "user", "content": question}] for question in QUESTIONS),
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is gravity?"},
    ],
    [
        {"role": "user", "content": "My name is Mira."},
        {"role": "assistant", "content": "Nice to meet you, Mira!"},
        {"role": "user", "content": "What is my name?"},
    ],
)
