"""What is known of the data: lengths, steps, useful tokens."""

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{{- message['content'] if message['content'] is string"
    " else message['content'] | map(attribute='text') | join }}"
    "{{- '<|im_end|>' + (eos_token or '' if message['role'] == 'assistant' else '') + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML in plain text, for a tokenizer that has no template."""
