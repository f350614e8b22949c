"""The chat templates of targets that people serve today, cut down to what decides about dates, thoughts and the ends of
turns.
"""

from pipeline.lm.config import TargetConfig
from pipeline.lm.template import apply_settings
from tests.kit import byte_tokenizer

LLAMA_3_2 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>'
    }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN_3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content, thoughts = message.content, '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or thoughts) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' +
            content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

QWEN_3_THINKING = QWEN_3.replace(  # the 2507 models', which always think
    """    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
""",
    """    {{- '<|im_start|>assistant\\n<think>\\n' }}
""",
)

SMOLLM_3 = """{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{{- "<|im_start|>system\\n## Metadata\\n\\nKnowledge Cutoff Date: June 2025\\n" -}}
{%- set today = strftime_now("%d %B %Y") -%}
{{- "Today Date: " ~ today ~ "\\nReasoning Mode: " + mode + "\\n\\n" -}}
{{- "## Custom Instructions\\n\\nYou are a helpful AI assistant.\\n\\n" -}}
{%- if xml_tools or python_tools -%}{{- "### Tools\\n\\n" -}}{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>user\\n" + message.content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if mode == "/think" -%}
            {{ "<|im_start|>assistant\\n" + message.content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" + message.content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ "<|im_start|>assistant\\n" + ("" if mode == "/think" else "<think>\\n\\n</think>\\n") }}
{%- endif -%}
"""

GPT_OSS = """{%- macro system_text() -%}
    {%- if model_identity is not defined %}
        {%- set model_identity = "You are ChatGPT, a large language model trained by OpenAI." %}
    {%- endif %}
    {{- model_identity + "\\nKnowledge cutoff: 2024-06\\n" }}
    {{- "Current date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
    {%- if reasoning_effort is not defined %}
        {%- set reasoning_effort = "medium" %}
    {%- endif %}
    {{- "Reasoning: " + reasoning_effort + "\\n\\n# Valid channels: analysis, commentary, final." }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" + system_text() + "<|end|>" }}
{%- if messages[0].role == "system" %}
    {{- "<|start|>developer<|message|># Instructions\\n\\n" + messages[0].content + "<|end|>" }}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- for message in turns -%}
    {%- if message.role == 'assistant' -%}
        {%- if "<|channel|>final<|message|>" in message.content %}
            {{- raise_exception("pass the text behind the marker") }}
        {%- endif %}
        {%- if loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- else -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}"""

# These never show an answer's thoughts, not even those of the last one, though the prompt opens them.
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
DEEPSEEK_V3_1 = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}" + DEEPSEEK_R1.replace(
    "'<｜Assistant｜>' + m", "'<｜Assistant｜></think>' + m"
).replace("<think>\n' }}", "' + ('<think>' if thinking else '</think>') }}")

R1_MARKERS = ["<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
HIDING = {DEEPSEEK_R1: R1_MARKERS, DEEPSEEK_V3_1: R1_MARKERS}
SPECIAL = {  # template -> its special tokens, the one that ends an answer first
    LLAMA_3_2: ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    QWEN_3: ["<|im_end|>", "<|im_start|>"],
    QWEN_3_THINKING: ["<|im_end|>", "<|im_start|>"],
    SMOLLM_3: ["<|im_end|>", "<|im_start|>"],
    GPT_OSS: ["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"],
}


def unsettled(template: str):
    """A tokenizer with the template and its markers, <think> an added token that is not special, as the Hub has it."""
    return unsettled_with(template, {**SPECIAL, **HIDING}[template])


def unsettled_with(template: str, special: list[str]):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": special})
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=False)
    tokenizer.eos_token = special[0]
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_with_settings(template: str, **keywords):
    """Return a tokenizer as `load_tokenizer` gives it for a recipe with these keywords; `template_date` is the date."""
    config = {key: keywords.pop(key) for key in ("template_date",) if key in keywords}
    tokenizer = unsettled(template)
    apply_settings(tokenizer, TargetConfig(model="some/model", template_keywords=keywords, **config))
    return tokenizer
