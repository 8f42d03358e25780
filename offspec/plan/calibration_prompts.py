"""Prompts of many kinds, to measure the draft's acceptance rate. Written for this purpose."""

CALIBRATION = (
    "What should I look at before I sign the lease of a flat?",
    "Write a Python function that merges two sorted lists, and show how to call it.",
    "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Which planets of the solar system have rings, and what are they made of?",
    "List seven things to pack for a week of hiking in the mountains.",
    "Rewrite this so that it is polite: Send me the report today, you promised it last week.",
    "Summarize in two sentences: The town council met on Monday to discuss the new bridge. Engineers said "
    "that the old one would last five more years at most. Residents asked for a path for bicycles. The "
    "council decided to ask three firms for offers by spring.",
    "Explain to a child why the sea is salty.",
)

VALIDATION = (
    "My bread does not rise. What may be the reason, and what should I change?",
    "Write a SQL query that finds the three customers who spent most in each year, and explain it.",
    "Describe a market square early in the morning, from the point of view of a cat.",
    "How does a refrigerator keep food cold?",
    "Give me ten ideas for a rainy Sunday with two small children.",
    "Turn this into a formal letter: hi, my parcel is broken, i want my money back, order 4711.",
    "Summarize in two sentences: Bees navigate by the sun. On cloudy days they use the pattern of "
    "polarised light in the sky. Back in the hive a forager dances, and the angle of the dance tells the "
    "others in which direction to fly, its length how far.",
    "What is the difference between weather and climate?",
)
