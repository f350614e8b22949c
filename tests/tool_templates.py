"""Chat templates of current targets, reduced to the part that shows tools, calls and results."""

from tests.templates import QWEN_3 as PLAIN_QWEN_3
from tests.templates import unsettled_with

QWEN_3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" + (tool | tojson) }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
""" + PLAIN_QWEN_3[PLAIN_QWEN_3.index("{%- set ns") :].replace(
    """        {{- '<|im_end|>\\n' }}
    {%- endif %}""",
    """        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}""",
)

LLAMA_3_1 = """{{- bos_token }}
{%- if tools_in_user_message is not defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if tools is not defined %}
    {%- set tools = none %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {{- messages[0]['content'] | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- set first_user_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions:\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) + "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + (message.content | tojson) + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GPT_OSS = """{%- macro kind(spec) -%}
    {%- if spec.type == "array" -%}
        {{- kind(spec['items']) + "[]" }}
    {%- else -%}
        {{- spec.type }}
    {%- endif -%}
{%- endmacro -%}
{%- set developer_message, turns = "", messages %}
{%- if messages[0].role in ("developer", "system") %}
    {%- set developer_message, turns = messages[0].content, messages[1:] %}
{%- endif %}
{%- if developer_message or tools %}
    {{- "<|start|>developer<|message|>" + developer_message }}
    {%- for tool in tools or [] %}
        {{- "\\ntype " + tool.function.name + " = (_: {" }}
        {%- for name, spec in tool.function.parameters.properties.items() %}
            {{- name + ": " + kind(spec) + "," }}
        {%- endfor %}
        {{- "}) => any;" }}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in turns -%}
    {%- if message.role == 'assistant' and "tool_calls" in message %}
        {%- set call = message.tool_calls[0].function %}
        {%- set answered = namespace(now=false) %}
        {%- for later in turns[loop.index:] %}
            {%- if later.role == 'assistant' and "tool_calls" not in later %}
                {%- set answered.now = true %}
            {%- endif %}
        {%- endfor %}
        {%- if message.content and not answered.now %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
        {{- call.arguments | tojson + "<|call|>" }}
        {%- set last.name = call.name %}
    {%- elif message.role == 'assistant' %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}
        {{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" }}
        {%- set last.name = none %}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}
            {{- raise_exception("Message has tool role, but there was no previous assistant message with a call!") }}
        {%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content | tojson + "<|end|>" }}
    {%- elif message.role == 'user' %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}"""

HERMES = """{{- bos_token }}
{%- if tools is iterable and tools | length > 0 %}
    {{- "<|im_start|>system\\nYou are a function calling AI model. <tools> " }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}
            {%- set tool = tool.function %}
        {%- endif %}
        {{- tool.name + ": " + tool.description + " " + (tool.parameters | tojson) + "\\n" }}
    {%- endfor %}
    {{- "</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ("user", "system") or (message.role == "assistant" and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"arguments": ' + (call.function.arguments | tojson) + ', "name": "' }}
            {{- call.function.name + '"}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if not message.name is defined %}
            {{- raise_exception("Tool response dicts require a 'name' key") }}
        {%- endif %}
        {{- '<|im_start|>tool\\n<tool_response>\\n{"name": "' + message.name + '", "content": ' }}
        {{- message.content | tojson + '}\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

SPECIAL = {
    QWEN_3: ["<|im_end|>", "<|im_start|>"],
    LLAMA_3_1: ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    GPT_OSS: ["<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"],
    HERMES: ["<|im_end|>", "<|im_start|>"],
}


def tools_shown_by(template: str):
    """A tokenizer with the template and its markers."""
    return unsettled_with(template, SPECIAL[template])
