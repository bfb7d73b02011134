#!/usr/bin/env python3
"""Conversations made from the documentation in Python packages, for fine-tuning on text that every machine can get.

    python benches/conversations.py OUT.jsonl WHEEL...

A question for each public function, method and class that has a documentation string ("What does `f(a, b)` in `package.module` do?"), and as
the answer its first paragraph. Wheels are those that benches/corpus.py downloads: ask of its held-out packages in one file, and of the
others in another. Answers of fewer than 30 or more than 800 characters are left out, and so are answers that came before. Standard library only.
"""
import ast, inspect, json, os, re, sys, zipfile


def signature(node):
    if isinstance(node, ast.ClassDef):
        return node.name
    names = [argument.arg for argument in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
    return f"{node.name}({', '.join(name for name in names if name not in ('self', 'cls'))})"


def documented(tree):
    """Public definitions with what they say of themselves, in the order of the file."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if text := ast.get_docstring(node):
                yield signature(node), re.sub(r"\s+", " ", inspect.cleandoc(text).split("\n\n")[0]).strip()


def conversations(wheel):
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted(name for name in archive.namelist() if name.endswith(".py") and "/test" not in name):
            try:
                tree = ast.parse(archive.read(path))
            except (SyntaxError, ValueError):
                continue
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for name, answer in documented(tree):
                yield f"What does `{name}` in `{module}` do?", answer


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    seen, count = set(), 0
    with open(sys.argv[1], "w") as out:
        for wheel in sorted(sys.argv[2:], key=os.path.basename):
            for question, answer in conversations(wheel):
                if 30 <= len(answer) <= 800 and answer not in seen:
                    seen.add(answer)
                    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                    out.write(json.dumps({"messages": messages}) + "\n")
                    count += 1
    print(f"{count} conversations")


if __name__ == "__main__":
    main()
