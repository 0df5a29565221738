"""The parts of `chat_model.CARDChatModel`: LangChain's side, above the engine."""
