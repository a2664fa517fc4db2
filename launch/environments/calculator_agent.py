"""An agent with two tools, written for OpenAI's client and for no library of training.

    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=key python calculator_agent.py "3*4+5"

`launch/recipes/agent.yaml` trains it as it is, by its function `solve`.
"""

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {result} of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
    for name, result in (("multiply", "product"), ("add", "sum"))
]


def use(name: str, arguments: str) -> str:
    """The result of a call, or what was wrong with it."""
    try:
        given = json.loads(arguments)
        a, b = given["a"], given["b"]
        return str({"multiply": lambda: a * b, "add": lambda: a + b}[name]())
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


async def solve(prompt: Any, client: AsyncOpenAI, turns: int = 4) -> str:
    """Ask the model for the result of `prompt.text`, with the tools, in at most `turns` turns."""
    chat: Any = [{"role": "user", "content": getattr(prompt, "text", prompt)}]
    for _ in range(turns):
        made = await client.chat.completions.create(model="policy", messages=chat, tools=TOOLS)
        message = made.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        chat.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = use(call.function.name, call.function.arguments)
            chat.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    print(asyncio.run(solve(sys.argv[1], AsyncOpenAI())))
