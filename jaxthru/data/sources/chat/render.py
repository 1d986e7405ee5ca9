"""From a conversation, as the JSON that readers make of it, to the document that its chat template writes."""

from collections import Counter
from collections.abc import Callable

from jaxthru.data.sources.chat.records import Malformed, Records, from_canonical, said_by_assistant
from jaxthru.data.sources.chat.sandbox import Failure
from jaxthru.data.sources.chat.template import ChatTemplate
from jaxthru.data.sources.record import Damage, Document

EMPTY = "empty answers"


def renderer(
    template: ChatTemplate, kind: Records, noted: Counter
) -> Callable[[Document], list[Document] | Damage]:
    """Returns what renders documents of a source: into one document each, into two of pairs, the chosen one
    first. What a template refuses is damage, with its reason. noted: counts answers without words, from which
    a model learns to say nothing.
    """

    def one(conversation: dict, document: Document) -> Document:
        if "messages" not in conversation:
            return _plain(conversation, document)
        answers = [each for each in said_by_assistant(conversation) if each.get("weight") != 0]
        noted[EMPTY] += sum(not (each.get("content") or "tool_calls" in each) for each in answers)
        rendered = template.render(conversation["messages"], conversation.get("tools"))
        marks = {"trained": rendered.trained, "literal": rendered.literal}
        return document._replace(text=rendered.text, rendered=True, **marks)

    def render(document: Document) -> list[Document] | Damage:
        try:
            found = from_canonical(document.text, kind)
            if kind != "pairs":
                return [one(found, document)]
            chosen, rejected = one(found["chosen"], document), one(found["rejected"], document)
            return [chosen, rejected._replace(read="")]  # its bytes are counted with the other's
        except Malformed as error:
            return document.place.damage(str(error))
        except RecursionError:
            return document.place.damage("nested too deeply")
        except Failure as error:
            return document.place.damage(f"the chat template fails: {error}")

    return render


def _plain(conversation: dict, document: Document) -> Document:
    """Of a text, or of a prompt with its completion, which no template writes: they become what they are."""
    if "text" in conversation:
        return document._replace(text=conversation["text"])
    prompt, completion = conversation["prompt"], conversation["completion"]
    trained = ((len(prompt), len(prompt) + len(completion)),) if completion else ()
    return document._replace(text=prompt + completion, trained=trained)
