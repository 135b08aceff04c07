"""Tool calls: read from texts, and told by a deployment whose model recites them."""

import json

import pytest
from starlette.testclient import TestClient
from tests.unit.reciter import END, write_reciter

from hearth.inference.engine.engine import EngineOptions, InferenceEngine
from hearth.inference.service import create_app
from hearth.inference.tool_calls import ToolCallReader, find_form
from hearth.models.loading import load_model, load_tokenizer
from hearth.sync.store import MemorySnapshotStore

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
SUB = '<tool_call>{"arguments": {}, "name": "sub"}</tool_call>'
ADD_READ = ("add", '{"a": 2, "b": 3}')
SUB_READ = ("sub", "{}")


class Written:
    """What of a tokenizer says how its model writes calls."""

    def __init__(self, chat_template="", response_template=None):
        self.added_tokens_decoder = {}
        self.chat_template = chat_template
        self.response_template = response_template


def result(pieces):
    content = "".join(piece.content for piece in pieces)
    return content, [(call.name, call.arguments) for piece in pieces for call in piece.calls]


HERMES = find_form(Written("...<tool_call>\n{..."))


def read(text, form=HERMES, tools=(), prompt=""):
    return result([ToolCallReader(form, tools, prompt).read(text)])


READ = {
    "no call": ("plain text", "plain text", []),
    "empty": ("", "", []),
    "one call": (ADD, "", [ADD_READ]),
    "text before": (f"Let me see.\n{ADD}", "Let me see.", [ADD_READ]),
    "text on the same line": (f"so {SUB}", "so ", [SUB_READ]),
    "two calls": (f"{ADD}\n{SUB}\n", "", [ADD_READ, SUB_READ]),
    "text around": (f"a\n\n{ADD}\nb\n{SUB}c", "a\nbc", [ADD_READ, SUB_READ]),
    "a character beyond ASCII": (
        '<tool_call>{"name": "say", "arguments": {"text": "größer\\n\\u00e9"}}</tool_call>',
        "",
        [("say", '{"text": "größer\\né"}')],
    ),
    "a number beyond 64 bits": (
        '<tool_call>{"name": "f", "arguments": {"x": 123456789012345678901234567890}}</tool_call>',
        "",
        [("f", '{"x": 123456789012345678901234567890}')],
    ),
    "a call behind a tag that is never closed": (
        f"<tool_call>never\n{ADD}",
        "<tool_call>never",
        [ADD_READ],
    ),
}


@pytest.mark.parametrize(("text", "content", "calls"), READ.values(), ids=READ.keys())
def test_calls_are_read_and_the_text_outside_is_content(text, content, calls):
    assert read(text) == (content, calls)


MALFORMED = {
    "no JSON": "<tool_call>add(2, 3)</tool_call>",
    "a list": "<tool_call>[1]</tool_call>",
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "an empty name": '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    "a name that is no text": '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    "no arguments": '<tool_call>{"name": "add"}</tool_call>',
    "arguments in a text": '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
    "infinity": '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
    "not a number": '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    "half a character": '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
    "deep": '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "</tool_call>",
    "never closed": '<tool_call>\n{"name": "add", "arguments": {}}\n',
    "never opened": '{"name": "add", "arguments": {}}</tool_call>',
    "half a tag": "a <tool_ca",
}


@pytest.mark.parametrize("span", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_no_call_stays_in_the_text_as_sampled(span):
    assert read(span) == (span, [])
    assert read(f"a\n{span}\nb") == (f"a\n{span}\nb", [])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("text", [case[0] for case in READ.values()] + [*MALFORMED.values()][:8])
def test_a_text_in_pieces_is_read_as_the_whole_one(text, size):
    assert read_in_pieces(text, size) == read(text)


def read_in_pieces(text, size, form=HERMES, tools=(), prompt=""):
    reader = ToolCallReader(form, tools, prompt)
    pieces = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
    return result([*pieces, reader.finish()])


def test_no_part_of_a_tag_is_told_before_it_is_decided():
    reader = ToolCallReader(HERMES)

    reported = [
        reader.push(piece).content for piece in ("a < b", " <", "tool", "s>\n", "<tool_", "call>")
    ]

    assert reported == ["a < b", " ", "", "<tools>", "", ""]
    assert reader.push('{"name": "f", "arguments": {}}</tool_call>').calls[0].name == "f"


XML = find_form(Written("<tool_call>\n<function={{ name }}>\n<parameter="))
LLAMA = find_form(Written("<|start_header_id|>{{ role }}<|end_header_id|>\n\n"))
GEMMA = find_form(
    Written(
        response_template={
            "start_anchor": "<|turn>model\n",
            "defaults": {"role": "assistant"},
            "fields": {
                "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
                "tool_calls": {
                    "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                    "close": "<tool_call|>",
                    "repeats": True,
                    "content": "json",
                    "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                    "transform": {
                        "type": "function",
                        "function": {"name": "{name}", "arguments": "{content}"},
                    },
                },
                "content": {"close": ["<turn|>"], "content": "text"},
            },
        }
    )
)
TYPED = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {
                    "seats": {"type": "integer"},
                    "price": {"type": "number"},
                    "window": {"type": "boolean"},
                    "names": {"type": "array"},
                    "code": {"type": "string"},
                    "note": {"type": ["string", "null"]},
                },
            },
        },
    }
]
BOOK = """<tool_call>
<function=book>
<parameter=seats>
2
</parameter>
<parameter=price>
10.50
</parameter>
<parameter=window>
true
</parameter>
<parameter=names>
["Ann", "Bo"]
</parameter>
<parameter=code>
  07
  x < 1
</parameter>
</function>
</tool_call>"""
BOOKED = {
    "seats": 2,
    "price": 10.5,
    "window": True,
    "names": ["Ann", "Bo"],
    "code": "  07\n  x < 1",
}
SAY = "<tool_call>\n<function=say>\n</function>\n</tool_call>"
FAMILIES = {
    "XML, typed": (XML, f"I book.\n\n{BOOK}", "I book.", [("book", BOOKED)]),
    "XML, two": (XML, f"{BOOK}\n{SAY}", "", [("book", BOOKED), ("say", {})]),
    "XML, cut": (XML, BOOK[:-12], BOOK[:-12], []),
    "XML, no function": (XML, ADD, ADD, []),
    "XML, a thought": (
        XML,
        f"<think>\n{SAY}\n</think>\n\n{SAY}",
        f"<think>\n{SAY}\n</think>",
        [("say", {})],
    ),
    "Hermes, text for a number": (
        HERMES,
        '<tool_call>{"name": "book", "arguments": {"seats": "2", "code": "7"}}</tool_call>',
        "",
        [("book", {"seats": 2, "code": "7"})],
    ),
    "Hermes, XML": (HERMES, BOOK, BOOK, []),
    "Llama": (LLAMA, '{"name": "add", "parameters": {"a": 2}}', "", [("add", {"a": 2})]),
    "Llama, with its tag": (
        LLAMA,
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}\n',
        "",
        [("f", {})],
    ),
    "Llama, an answer in JSON": (LLAMA, '{"sum": 5}', '{"sum": 5}', []),
    "Llama, cut": (LLAMA, '{"name": "add", "para', '{"name": "add", "para', []),
    "Llama, text": (LLAMA, "It is {5}.", "It is {5}.", []),
    "the tokenizer's own": (
        GEMMA,
        'So <|tool_call>call:say{text:<|"|>a "b" {c}<|"|>,n:1}<tool_call|>',
        "So ",
        [("say", {"text": 'a "b" {c}', "n": 1})],
    ),
    "the tokenizer's own, broken": (
        GEMMA,
        "<|tool_call>call:say{text:}<tool_call|>",
        "<|tool_call>call:say{text:}<tool_call|>",
        [],
    ),
}


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("form", "text", "content", "calls"), FAMILIES.values(), ids=FAMILIES.keys()
)
def test_each_familys_calls_are_read_with_the_types_of_the_tools(form, text, content, calls, size):
    told, found = read_in_pieces(text, size, form, TYPED)

    assert (told, [(name, json.loads(text)) for name, text in found]) == (content, calls)


def test_a_reasoning_that_the_prompt_begins_is_text_until_it_ends():
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"

    told = read(f"{SAY} or so\n</think>\n\n{SAY}", XML, prompt=prompt)

    assert told == (f"{SAY} or so\n</think>", [("say", "{}")])
    assert read(SAY, XML, prompt=f"{prompt}\n</think>\n\n") == ("", [("say", "{}")])
    # Of an earlier turn nothing is opened any more.
    assert read(SAY, XML, prompt=f"{prompt}<|im_end|>\n<|im_start|>assistant\n")[1] != []


def test_special_tokens_of_a_call_stay_in_the_text_and_no_others():
    class Token(str):
        special = True

    tokenizer = Written("<tool_call>")
    texts = ("<tool_call>", "<|im_end|>", '<|"|>', "<|tool_call>", "<tool_call|>", "<|python_tag|>")
    tokenizer.added_tokens_decoder = dict(enumerate(map(Token, texts)))

    assert HERMES.visible_tokens(tokenizer) == ("<tool_call>",)
    assert GEMMA.visible_tokens(tokenizer) == ('<|"|>', "<|tool_call>", "<tool_call|>")
    assert LLAMA.visible_tokens(tokenizer) == ("<|python_tag|>",)


def test_a_long_text_is_read_in_time_that_grows_with_it():
    text = "word " * 40_000 + ADD

    assert read_in_pieces(text, 5) == ("word " * 39_999 + "word ", [ADD_READ])


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
PIECES = [
    "Let me",
    " see.",
    "\n",
    "<tool_call>",
    '\n{"name": "add", ',
    '"arguments": {"a": 2',
    ', "b": 3}}\n',
    "</tool_call>",
]
TEMPLATE = (
    "{% if tools %}[{{ tools | length }}]{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls %}{{ '\\n<tool_call>\\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '\\n</tool_call>' }}{% endfor %}<|end|>{% endfor %}<|assistant|>"
)


@pytest.fixture(scope="module", params=[False, True], ids=["plain tags", "special tags"])
def client(request, tmp_path_factory):
    """A deployment that always answers with some text and one call."""
    special = ["<tool_call>", "</tool_call>"] if request.param else []
    folder = write_reciter(
        tmp_path_factory.mktemp("reciter"),
        {"<|assistant|>": PIECES},
        chat_template=TEMPLATE,
        special=special,
    )
    engine = InferenceEngine(
        load_model(folder, name="reciter"),
        tokenizer=load_tokenizer(folder),
        options=EngineOptions(max_seq_len=256),
    )
    app = create_app(engine, model_name="reciter", snapshots=MemorySnapshotStore())
    with TestClient(app) as client:
        yield client
    engine.close()


@pytest.fixture
def xml_client(tmp_path):
    """A deployment whose model writes calls as Qwen3.5 does."""
    template = TEMPLATE + "{# <tool_call><function=NAME><parameter=KEY> #}"
    folder = write_reciter(
        tmp_path, {"<|assistant|>": ["I book.\n\n", BOOK]}, chat_template=template
    )
    engine = InferenceEngine(
        load_model(folder, name="reciter"),
        tokenizer=load_tokenizer(folder),
        options=EngineOptions(max_seq_len=256),
    )
    app = create_app(engine, model_name="reciter", snapshots=MemorySnapshotStore())
    with TestClient(app) as client:
        yield client
    engine.close()


def test_a_deployment_reads_the_form_of_its_model_whole_and_streamed(xml_client):
    choice = choice_of(xml_client, tools=TYPED)
    chunks = chunks_of(xml_client, tools=TYPED)

    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I book."
    assert json.loads(call["function"]["arguments"]) == BOOKED
    (told,) = [delta["tool_calls"] for chunk in chunks if "tool_calls" in (delta := chunk["delta"])]
    assert told == [{"index": 0} | call]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "I book."


def ask(client, messages=None, **fields):
    messages = messages or [{"role": "user", "content": "2 + 3?"}]
    body = {"messages": messages, "temperature": 0, "raw_output": True} | fields
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def choice_of(client, **fields):
    return ask(client, **fields).json()["choices"][0]


def chunks_of(client, **fields):
    lines = ask(client, stream=True, **fields).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]


def test_an_answer_to_offered_tools_tells_its_calls(client):
    choice = choice_of(client, tools=TOOLS)

    message = choice["message"]
    (call,) = message["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see."
    assert call["type"] == "function"
    assert call["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    assert call["id"].startswith("call_")
    assert choice == choice_of(client, tools=TOOLS)


def test_calls_of_several_answers_have_ids_of_their_own(client):
    choices = ask(client, tools=TOOLS, n=3).json()["choices"]

    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


def test_without_offered_tools_the_text_stays_as_sampled(client):
    plain = choice_of(client)
    closed = choice_of(client, tools=TOOLS, tool_choice="none")

    for choice in (plain, closed):
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]
        assert choice["message"]["content"].startswith("Let me see.\n")
    assert plain["raw_output"]["prompt_token_ids"] == closed["raw_output"]["prompt_token_ids"]


def test_an_answer_that_was_cut_inside_its_call_is_text(client):
    choice = choice_of(client, tools=TOOLS, max_tokens=len(PIECES) - 1)

    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": "".join(PIECES[:-1])}


def test_an_answer_that_was_cut_behind_its_call_says_that_it_was_cut(client):
    choice = choice_of(client, tools=TOOLS, max_tokens=len(PIECES))

    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"


def test_a_stop_string_inside_a_call_cuts_the_text_there(client):
    choice = choice_of(client, tools=TOOLS, stop=["</tool_call>"])

    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "".join(PIECES[:-1])


def test_a_stream_tells_the_content_outside_its_calls_and_each_call_whole(client):
    whole = choice_of(client, tools=TOOLS)

    chunks = chunks_of(client, tools=TOOLS)

    deltas = [chunk["delta"] for chunk in chunks]
    content = "".join(delta.get("content") or "" for delta in deltas)
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert content == "Let me see."
    assert calls == [{"index": 0} | whole["message"]["tool_calls"][0]]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "tool_calls"
    ]
    assert chunks[-1]["raw_output"] == whole["raw_output"]


def test_a_stream_that_is_cut_inside_its_call_ends_with_the_text_as_sampled(client):
    chunks = chunks_of(client, tools=TOOLS, max_tokens=len(PIECES) - 1)

    content = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    assert content == "".join(PIECES[:-1])
    assert chunks[-1]["finish_reason"] == "length"


def test_streamed_logprobs_are_one_per_token_also_while_a_call_is_held(client):
    chunks = chunks_of(client, tools=TOOLS, logprobs=True)

    rows = [row["token"] for chunk in chunks for row in chunk["logprobs"]["content"]]
    assert rows == [*PIECES, END]


def test_a_call_that_is_sent_back_renders_as_it_was_sampled(client):
    asked = [{"role": "user", "content": "2 + 3?"}]
    first = choice_of(client, messages=asked, tools=TOOLS)
    result = {"role": "tool", "content": "5", "tool_call_id": "x"}

    second = choice_of(client, messages=[*asked, first["message"], result], tools=TOOLS)

    prompts = [item["raw_output"]["prompt_token_ids"] for item in (first, second)]
    sampled = first["raw_output"]["completion_token_ids"]
    assert prompts[1][: len(prompts[0]) + len(sampled)] == prompts[0] + sampled
    ids = [item["message"]["tool_calls"][0]["id"] for item in (first, second)]
    assert ids[0] != ids[1]
