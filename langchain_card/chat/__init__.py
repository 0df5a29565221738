"""What `chat_model.CARDChatModel` is made of: LangChain's side, above the engine."""
