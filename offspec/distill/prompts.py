"""Questions for a target to answer, so that a head is trained on its style. Written for this purpose."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from offspec.core.errors import RequestError

T = TypeVar("T")

_TOPICS = (
    "keeping bees", "black holes", "baking sourdough bread", "a bicycle tour along a river",
    "the water cycle", "learning to play the piano", "saving money", "the Roman empire",
    "house plants", "electric cars", "good sleep", "photosynthesis", "chess openings",
    "moving to another city", "volcanoes", "a birthday party for a child", "public libraries",
    "wind turbines", "how vaccines work", "writing a cover letter", "the moon landing",
    "healthy breakfasts", "repairing a flat tyre", "teamwork at the office", "coral reefs",
    "the stock market", "training a puppy", "medieval castles", "camping in the rain",
    "the human heart", "learning a foreign language", "recycling", "jazz music", "a vegetable garden",
    "time management", "the printing press", "earthquakes", "making coffee", "online privacy",
    "a quarrel between friends", "swimming", "migrating birds", "the internet", "knitting a scarf",
    "tea and its history", "bridges", "a night train", "dinosaurs", "a job interview for a nurse",
    "painting a room",
)  # fmt: skip

_TASKS = (
    "Explain {} to a beginner.",
    "Write a short story about {}.",
    "What are the most important facts about {}?",
    "Give me ten tips about {}.",
    "I am curious about {}. Where should I start, and what should I avoid?",
    "Write a friendly email to a colleague about {}.",
    "What are the advantages and disadvantages that people discuss when they talk about {}?",
    "Make a table of five things to know about {}.",
    "Write a dialogue between a teacher and a pupil about {}.",
    "Summarize what is known about {} in three sentences.",
    "Write a poem about {}.",
    "Describe {} to someone who has never heard of it, step by step.",
    "Plan a talk of ten minutes about {}.",
    "What questions would an expert ask about {}?",
    "Rewrite this so that it sounds formal: hey, can you tell me more about {}? thanks!",
    "Why does {} matter?",
)

_CODE = (
    "a function that counts the words of a text", "a class for a bank account",
    "a function that finds the longest line of a file", "a program that plays rock, paper, scissors",
    "a function that checks whether a number is prime", "a stack with push and pop",
    "a function that reverses a linked list", "a script that renames all photographs in a folder",
    "a function that turns seconds into hours, minutes and seconds", "a binary search",
    "a function that removes duplicates and keeps the order", "a timer",
    "a function that sorts words by length",
    "a program that reads numbers and prints their mean", "a function that adds two matrices",
    "a small calculator", "a queue", "a function that finds anagrams", "a parser for lines of key and value",
    "a function that draws a triangle of stars",
)  # fmt: skip

_LANGUAGES = ("Python", "JavaScript", "C", "Java")


def builtin_questions() -> list[str]:
    """Return about 1,000 questions: tasks times topics, and programs to write, evenly mixed."""
    talk = [
        _TASKS[(topic + turn) % len(_TASKS)].format(_TOPICS[topic])
        for turn in range(len(_TASKS))
        for topic in range(len(_TOPICS))
    ]
    code = [f"Write {what} in {language}, and explain it." for language in _LANGUAGES for what in _CODE]
    every = len(talk) // len(code)
    mixed: list[str] = []
    for number, question in enumerate(talk):
        mixed.append(question)
        if number % every == every - 1 and code:
            mixed.append(code.pop(0))
    return mixed + code


def read_prompts(file: Path) -> list[str]:
    """Read questions from a file: one per line, or with .jsonl one object per line with a `prompt`.

    Raises RequestError.
    """
    try:
        lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
        found = [json.loads(line)["prompt"] for line in lines] if file.suffix == ".jsonl" else lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a line without text under 'prompt'"
        raise RequestError(f"cannot read prompts from {file}: {reason or error}") from error
    if not found or not all(isinstance(text, str) and text.strip() for text in found):
        raise RequestError(f"{file} has no prompts: give one per line, or a 'prompt' per object of a .jsonl")
    return found


def cyclic_item(questions: Sequence[T], number: int) -> tuple[T, int]:
    """Return question `number` of a repeated list, and the number of full repetitions before it."""
    return questions[number % len(questions)], number // len(questions)
